"""Print where the processes of runs and servers listen on this machine, and who can connect.

    python -m scripts.tools.listening [PID ...]

With process ids: these processes and their descendants; else all processes of jaxrlhf and Ray. Needs psutil 6.
"""

import argparse
import ipaddress

import psutil


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pids", nargs="*", type=int, metavar="PID")
    for process in chosen(parser.parse_args().pids):
        try:
            command = " ".join(process.cmdline())
            listening = {one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN}
        except psutil.Error as error:
            print(f"{process.pid:>8}  cannot be looked at: {error}")
            continue
        for host, port in sorted(listening):
            print(f"{process.pid:>8}  {host}:{port:<6} {reachable(host):34}  {command:.80}")


def chosen(pids: list[int]) -> list[psutil.Process]:
    """Return the processes of these ids with their descendants; without ids, those of jaxrlhf and Ray."""
    if pids:
        named = [psutil.Process(pid) for pid in pids]
        return [*named, *(child for one in named for child in one.children(recursive=True))]
    words = ("jaxrlhf", "raylet", "gcs_server", "ray::", "/ray/")
    commands = {one: " ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
    return [one for one, command in commands.items() if any(word in command for word in words)]


def reachable(host: str) -> str:
    """Say who can connect to an address."""
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return "this machine only"
    return "everybody who reaches the machine" if address.is_unspecified else "everybody who reaches the address"


if __name__ == "__main__":
    main()
