"""`python -m jaxrlhf.view runs/`: show runs side by side in the browser, during training too.

The page has curves with an explanation of every metric, samples, times, and the differences between settings. It is
served only on this machine, at 127.0.0.1, needs no network, and reads nothing outside the given folder.
"""

from pathlib import Path

from jaxrlhf.config import CommandLine, Refusal, run_command


def main() -> None:
    """Run the command."""
    command = CommandLine(
        prog="jaxrlhf view",
        description="Show runs in the browser.",
        examples=[("runs/", "all runs of a folder, side by side")],
    )
    command.add_argument("folder", nargs="?", default="runs", help="folder with the workdirs of runs; default: runs")
    command.add_argument("--port", type=int, default=6060, help="port to listen on; 0 chooses a free port")
    flags = command.parse_args()
    try:
        from jaxrlhf.viewer import ViewServer
        from jaxrlhf.viewer.run_files import RunFiles
    except ModuleNotFoundError as error:
        raise Refusal(f"view needs {error.name}, which is not installed: pip install 'jaxrlhf[view]'") from error
    with ViewServer(RunFiles(Path(flags.folder)), port=flags.port) as server:
        print(f"runs in {flags.folder} at {server.address} (stop with Ctrl-C)", flush=True)
        server.wait()


if __name__ == "__main__":
    run_command(main)
