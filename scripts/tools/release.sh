#!/usr/bin/env bash
# Build the release, dist/*.whl and dist/*.tar.gz, and train one step from each in an empty environment elsewhere.
#
#   bash scripts/tools/release.sh [PYTHON [PYTHON]]   # the wheel's interpreter, and that of the source distribution
#
# The environments stay in $ENVIRONMENTS where that names a folder: wheel/ and source/.
set -euo pipefail
cd "$(dirname "$0")/../.."
for_wheel=${1:-python3}
for_source=${2:-$for_wheel}
folder=${ENVIRONMENTS:-$(mktemp -d)}
[[ -n ${ENVIRONMENTS:-} ]] || trap 'rm -rf "$folder"' EXIT

rm -rf dist
"$for_wheel" -m venv "$folder/builder"
"$folder/builder/bin/pip" install -q hatchling
"$folder/builder/bin/python" -m hatchling build

try() { # NAME INTERPRETER FILE
    "$2" -m venv "$folder/$1"
    "$folder/$1/bin/pip" install -q "$3"
    cd "$folder/$1" # elsewhere, so that nothing of the checkout is imported
    bin/python -m jaxrlhf.train --config ppo_arithmetic.py --steps 1 --cold-start.steps 1 --workdir run
    bin/python -c "
import sys, jax, jaxrlhf
from jaxrlhf.config import shipped
assert jaxrlhf.__file__.startswith(sys.prefix) and jaxrlhf.__version__ in '$3', jaxrlhf.__file__
print(f'$1: {jaxrlhf.__version__} with {len(shipped())} configurations, '
      f'Python {sys.version.split()[0]}, JAX {jax.__version__}')"
}
try wheel "$for_wheel" dist/*.whl &
wheel=$!
try source "$for_source" dist/*.tar.gz &
source=$!
wait $wheel
wait $source
