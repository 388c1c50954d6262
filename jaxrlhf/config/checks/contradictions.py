"""Check of a whole configuration: settings that contradict each other are refused before anything compiles."""

from itertools import product

from jaxrlhf.config.checks import algorithms, data, placement, rollout
from jaxrlhf.config.refusal import checking
from jaxrlhf.config.run import Config

_CHECKS = (
    *(placement.check_pools, placement.check_offload, placement.check_lora),
    *(rollout.check_sampler, rollout.check_schedule, rollout.check_responses),
    *(placement.check_search, placement.check_layouts, placement.check_microbatches),
    *(data.check_sources, data.check_records, data.check_environment, data.check_weights, data.check_saving),
    *(algorithms.check_algorithm, rollout.check_sampling),
)


def checked(config: Config) -> Config:
    """Return a configuration whose settings do not contradict each other.

    `load`, `override`, `run` and `evaluate_policy` call it; the last two check a `Config` that is built in Python.

    Raises:
      Refusal: Settings contradict each other, in the run or in its cold start.
    """
    if checking():
        for phase, check in product(reversed(config.phases), _CHECKS):
            check(phase)
    return config
