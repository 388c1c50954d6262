"""Host processes of one pool, started by Ray and joined by JAX.

Ray starts the processes, carries calls and handles, and reports dead processes. Joint computation goes through JAX.
After any failure all processes of the pool are ended, because a process without its peers may wait in a collective
forever.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from jaxrlhf.config.cluster import RayCluster
from jaxrlhf.single_controller.ray import cluster as ray_cluster
from jaxrlhf.single_controller.ray.actor import (
    Activity,
    HostProcess,
    ProcessLocation,
    Raised,
    Setup,
    log_header,
    log_path,
)
from jaxrlhf.single_controller.ray.answers import DEATH_REPORT_S, Answers, collect
from jaxrlhf.single_controller.ray.failure import (
    HostClosed,
    HostDied,
    HostFailure,
    HostHung,
    HostId,
    HostNotStarted,
    HostRaised,
)
from jaxrlhf.single_controller.ray.stored import Stored

CALL_THREADS = 16  # calls that a host runs at once; more wait
STATUS_S = 3.0  # maximum wait for a host to report its activity
END_S = 10.0  # maximum wait until killed processes are gone
LOG_LINES = 20


class HostProcesses:
    """Processes of one pool, in one JAX distributed world; each holds an object made by `factory(rank, hosts)`.

    With several processes, the rank is `jax.process_index()`.

    Calls may come from several threads, and each call runs on all hosts. Calls in which hosts communicate must come one
    after another.

    Args:
      name: Name of the pool, for messages and logs.
      factory: Function that cloudpickle can send, including lambdas and functions of the main module.
      hosts: Number of processes.
      log_directory: Folder of `<name>-<rank>.log`, the printed output of each host, on the host's machine.

    Raises:
      HostNotStarted: The cluster lacks resources, or processes are not up in time.
      HostDied: A process ends while it starts.
      Exception: The factory raised; a note names the host.
    """

    def __init__(
        self, name: str, factory: Callable[[int, int], Any], *, hosts: int, cluster: RayCluster, log_directory: Path
    ) -> None:
        self.name = name
        self._timeout_s = cluster.call_timeout_s
        self._log_directory = log_directory.absolute()
        self._ending = threading.RLock()  # a signal's handler may close the pool while it is being closed
        self._failure: HostFailure | None = None
        self._hosts = [HostId(name) for _ in range(hosts)]
        self._actors: list[Any] = []
        self._group: Any = None
        try:
            self._start(factory, cluster)
        except BaseException as error:
            self._end(
                error if isinstance(error, HostFailure) else HostClosed(HostId(name), "start", f"failed: {error}")
            )
            raise

    @property
    def hosts(self) -> tuple[HostId, ...]:
        """Identities of the processes, in order of rank."""
        return tuple(self._hosts)

    def call(self, method: str, *args: Any, label: str, timeout_s: float | None = None) -> list[Stored]:
        """Run `object.method(*args)` on every host, and wait for all hosts.

        Args:
          args: Arguments, stored once for all hosts. Handles among the arguments, alone or in lists and tuples, are
            loaded by the hosts themselves.
          label: Name of the call for messages, such as `actor.update_actor`.
          timeout_s: Time limit in seconds; None is the cluster's `call_timeout_s`.

        Returns:
          One handle per host, in order of rank.

        Raises:
          HostDied: A host process ended.
          HostHung: A host did not answer in time.
          Exception: The method raised on a host; a note names the host.
        """
        import ray

        self._check_open(label)
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        return self._ask("call", [(method, [ray.put(args)], label)] * len(self._actors), label, deadline)

    def peek(self, name: str) -> Any:
        """Return an attribute of the first host's object, also while calls run; None if the host is late or gone."""
        import ray

        if self._failure is not None:
            return None
        reference = self._actors[0].peek.options(concurrency_group="watch").remote(name)
        ray.wait([reference], timeout=STATUS_S)
        return _value_now(reference)

    def close(self) -> None:
        """End the processes, even if calls are running. Calls in progress in other threads raise `HostClosed`."""
        self._end(HostClosed(HostId(self.name), f"{self.name}.close", "was closed by its owner"))

    def _start(self, factory: Callable[[int, int], Any], cluster: RayCluster) -> None:
        from ray import cloudpickle

        label = f"{self.name}.start"
        timeout_s = cluster.start_timeout_s
        deadline = time.monotonic() + timeout_s
        self._group = ray_cluster.place(self.name, len(self._hosts), cluster, timeout_s=timeout_s)
        self._actors = _launch(self._group, len(self._hosts), cluster)
        places = self._ask("place", [()] * len(self._actors), label, deadline)
        # A TPU slice ranks its processes by machine, regardless of the numbers that they join with; elsewhere the
        # number is the rank. Processes therefore join in the order of their machines, if known, so that JAX's service
        # and its devices agree on the numbers. Afterwards they are sorted by the ranks that JAX reports.
        order = sorted(range(len(places)), key=lambda index: (places[index].worker or 0, index))
        self._order_by_rank(order, places)
        [coordinator] = self._ask("free_address", [()], label, deadline)
        setup = Setup(
            hosts=tuple(self._hosts),
            coordinator=coordinator,
            factory=cloudpickle.dumps(factory),
            log_directory=self._log_directory,
            directory=os.getcwd(),
            import_path=tuple(os.path.abspath(entry) for entry in sys.path),
            secrets={name: os.environ[name] for name in ray_cluster.SECRETS if name in os.environ},
            timeout_s=timeout_s,
        )
        joined = self._ask("join", [(setup, number, label) for number in range(len(self._actors))], label, deadline)
        ranks = [stored.load() for stored in joined]
        self._order_by_rank(sorted(range(len(ranks)), key=ranks.__getitem__), [places[index] for index in order])
        self._ask("start", [(host, label) for host in self._hosts], label, deadline)

    def _order_by_rank(self, order: Sequence[int], places: Sequence[ProcessLocation]) -> None:
        """Sort the processes by rank; `order` has the current index of each rank, `places` the current locations."""
        self._actors = [self._actors[index] for index in order]
        self._hosts = [HostId(self.name, rank, places[at].node_ip, places[at].pid) for rank, at in enumerate(order)]

    def _ask(self, method: str, args_by_host: Sequence[tuple[Any, ...]], label: str, deadline: float) -> list[Any]:
        """Call a method on the first hosts, one per entry of `args_by_host`; return the answers, or end the pool."""
        start = time.monotonic()
        pairs = zip(self._actors, args_by_host, strict=False)
        references = [getattr(actor, method).remote(*args) for actor, args in pairs]
        try:
            answers = collect(references, deadline=deadline, ended=lambda: self._failure is not None)
        except BaseException as error:  # such as Ctrl-C: hosts are in a call that nobody waits for
            self._end(HostClosed(HostId(self.name), label, f"was interrupted by {error!r}"))
            raise
        if answers.complete:
            return [answers.values[rank] for rank in range(len(references))]
        self._check_open(label)  # if another thread has found a failure, it is the cause here
        if answers.lost_peer:
            answers.died |= self._deaths_after_answers([*answers.values, *answers.raised])
        if answers.died:
            self._fail(self._died(answers, label))
        if answers.raised:
            rank, raised = min(answers.raised.items(), key=lambda item: item[1].lost_peer)
            self._fail_with_exception(raised, self._hosts[rank], label)
        self._fail(self._hung(answers, label, waited_s=time.monotonic() - start))

    # Failures

    def _check_open(self, label: str) -> None:
        first = self._failure
        if first is not None:
            cause = first.cause.splitlines()[0]
            failure = type(first)(first.host, label, f"{cause} (in {first.label}, which ended the pool)")
            raise failure from (first.__cause__ or first)

    def _fail(self, failure: HostFailure) -> NoReturn:
        self._end(failure)
        if self._failure is not failure:  # another thread found a failure first
            self._check_open(failure.label)
        raise failure

    def _fail_with_exception(self, raised: Raised, host: HostId, label: str) -> NoReturn:
        """Raise the exception of a host's method, and keep it as the cause of the errors of other threads' calls."""
        error: BaseException = RuntimeError(f"{raised.kind}: {raised.text}")
        if raised.pickled is not None:
            with suppress(Exception):  # a class that only the host can import; its name and text remain
                error = pickle.loads(raised.pickled)
        error.add_note(f"raised in {label} on {host}; stack on the host:\n{raised.stack}")
        failure = HostRaised(host, label, f"raised {raised.kind}: {raised.text}")
        failure.__cause__ = error
        self._end(failure)
        raise error

    def _deaths_after_answers(self, ranks: list[int]) -> dict[int, str]:
        """Return Ray's reasons for the hosts of `ranks` that died after answering; a living host answers at once."""
        references = [self._actors[rank].place.options(concurrency_group="watch").remote() for rank in ranks]
        answers = collect(
            references, deadline=time.monotonic() + DEATH_REPORT_S, ended=lambda: self._failure is not None
        )
        return {ranks[index]: reason for index, reason in answers.died.items()}

    def _died(self, answers: Answers, label: str) -> HostDied:
        # Host 0 runs JAX's coordination service; the other processes abort when the service is gone.
        ranks = sorted(answers.died, key=bool)
        cause = f"died: {answers.died[ranks[0]]}"
        if ranks[1:]:
            cause += f"\nAfter this died: {', '.join(str(self._hosts[rank]) for rank in ranks[1:])}."
        return HostDied(self._hosts[ranks[0]], label, "\n".join([cause, *(self._log_tail(rank) for rank in ranks)]))

    def _hung(self, answers: Answers, label: str, *, waited_s: float) -> HostFailure:
        activities = self._activities()
        # Hosts that wait in JAX may only wait for the other hosts, so they come last.
        ranks = sorted(answers.missing, key=lambda rank: _waits_in_jax(activities[rank]))
        lines = [f"did not answer within {waited_s:.1f} s; hosts that answered: {sorted(answers.values) or 'none'}"]
        for rank in ranks:
            lines.append(f"{self._hosts[rank]}")
            lines.extend(_activity_lines(activities[rank]))
        kind = HostNotStarted if label == f"{self.name}.start" else HostHung
        return kind(self._hosts[ranks[0]], label, "\n".join(lines))

    def _activities(self) -> list[tuple[Activity, ...] | None]:
        """Return the calls in progress on each host; None for a host that does not answer, in C code or stopped."""
        import ray

        references = [actor.status.options(concurrency_group="watch").remote() for actor in self._actors]
        ray.wait(references, num_returns=len(references), timeout=STATUS_S)
        return [_value_now(reference) for reference in references]

    def _log_tail(self, rank: int) -> str:
        host = self._hosts[rank]
        log = log_path(self._log_directory, host)
        if not log.exists():
            return f"Its log, if any, is on its machine: {log}"
        lines = log.read_text(errors="replace").rpartition(log_header(host))[2].splitlines()[1:]
        lines = [line for line in lines if not line.startswith("Extension modules: ")]  # long line of a crash dump
        return "\n".join([f"{log} ends with:", *(f"  {line}" for line in lines[-LOG_LINES:] or ["no lines"])])

    # End of the processes

    def _end(self, failure: HostFailure) -> None:
        """Kill every process, once; later calls raise `failure`."""
        with self._ending:
            if self._failure is not None:
                return
            self._failure = failure
            import ray

            for actor in self._actors:
                ray.kill(actor)
            if self._group is not None:
                self._await_end()
                ray.util.remove_placement_group(self._group)

    def _await_end(self) -> None:
        """Wait until killed processes are gone, so that their devices and memory are free for the next user.

        Processes of this machine are visible in /proc. For other machines, Ray frees the placement group's resources. A
        call on a killed actor is no test, because it fails as soon as the kill is requested.
        """
        import ray

        here = ray.util.get_node_ip_address()
        pids = [host.pid for host in self._hosts if host.node_ip == here]
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            if not any(Path(f"/proc/{pid}").exists() for pid in pids) and ray_cluster.is_vacant(self._group):
                return
            time.sleep(0.05)


def _launch(group: Any, hosts: int, cluster: RayCluster) -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = ray_cluster.needs(cluster)
    options = {
        "num_cpus": resources.pop("CPU"),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "runtime_env": {"env_vars": ray_cluster.environment(cluster)},
        "max_concurrency": CALL_THREADS,
    }
    remote: Any = ray.remote  # its type annotations lack concurrency groups
    actor = remote(concurrency_groups={"watch": 2})(HostProcess)  # threads that answer while all others are busy
    return [
        actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index), **options).remote()
        for index in range(hosts)
    ]


def _waits_in_jax(calls: tuple[Activity, ...] | None) -> bool:
    return bool(calls) and all(call.in_jax for call in calls or ())


def _activity_lines(calls: tuple[Activity, ...] | None) -> Iterator[str]:
    if calls is None:
        yield "  does not report its calls: stopped, or in C code that holds the interpreter lock"
    for call in calls or ():
        yield f"  for {call.running_s:.1f} s in {call.label}{', waiting for JAX' if call.in_jax else ''}"
        yield from (f"  {line}" for line in call.stack.splitlines())


def _value_now(reference: Any) -> Any:
    import ray

    with suppress(ray.exceptions.RayError):  # not answered yet, or dead
        return ray.get(reference, timeout=0)
    return None
