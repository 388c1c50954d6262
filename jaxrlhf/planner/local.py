"""The hardware that a plan is for: named, measured, or the devices of this process."""

from dataclasses import replace

from jaxrlhf.config import Config, Refusal
from jaxrlhf.planner.devices import hardware, recognise
from jaxrlhf.planner.hardware import Hardware

_HOW = "name it, such as a100x16x8, or give the file that `python -m jaxrlhf.calibrate` wrote there, as hardware"
_SHARED = ("memory_bytes", "matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "host_bytes_per_s")


def hardware_of(config: Config, spec: str | None = None) -> Hardware:
    """Hardware that a run is planned for; the configuration takes as many of its devices as it says.

    Args:
      spec: A name or a file; None is the hardware that the run would be launched on from here.

    Raises:
      Refusal: An unknown name, fewer devices than are asked for, or devices of no known kind.
    """
    if spec is not None:
        return taken(hardware(spec), config.devices)
    return local_hardware(config) if config.cluster is None else cluster_hardware(config)


def local_hardware(config: Config) -> Hardware:
    """The devices of this process that the run takes; they are one machine.

    Raises:
      Refusal: They are of no known kind, more than the hardware that is named has, or fewer than are asked for.
    """
    import jax

    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    count = config.devices or len(devices)
    if count > len(devices):
        raise Refusal(
            f"devices={count} were asked for and JAX sees {len(devices)} {platform} devices; lower them, or plan "
            f"for other devices with --hardware"
        )
    if config.hardware is None:
        name = recognise(kind, platform)
        if name is None:
            raise Refusal(f"of the {len(devices)} devices here, {kind!r}, no figures are known; {_HOW}")
        return taken(hardware(f"{name}x1x{len(devices)}"), count)
    described = hardware(config.hardware)
    if count > described.devices_per_machine:
        raise Refusal(
            f"hardware={config.hardware!r} has machines of {described.devices_per_machine} devices, and this process "
            f"uses {count}; {_HOW}"
        )
    return taken(replace(described, machines=1), count)


def cluster_hardware(config: Config) -> Hardware:
    """Hardware that the configuration names, because a controller sees no device of its cluster.

    Raises:
      Refusal: It names none.
    """
    if config.hardware is None:
        raise Refusal(f"from here no device of a cluster is seen, so placement='auto' has to know what it is: {_HOW}")
    return taken(hardware(config.hardware), config.devices)


def taken(machines: Hardware, devices: int | None) -> Hardware:
    """The first devices of the machines; None is all of them.

    Raises:
      Refusal: There are fewer, or they are no whole number of machines.
    """
    if devices is None or devices == machines.devices:
        return machines
    if devices > machines.devices:
        raise Refusal(
            f"devices={devices} were asked for, and {machines.machines} machines of {machines.devices_per_machine} x "
            f"{machines.name} have {machines.devices}; lower devices, or name more machines"
        )
    each = machines.devices_per_machine
    if devices % each == 0:
        return replace(machines, machines=devices // each)
    if devices > each:
        raise Refusal(f"devices={devices} is no whole number of machines of {each}; give a multiple of {each}")
    part = replace(machines, machines=1, devices_per_machine=devices)
    if not machines.shared_compute:
        return part
    # Rates are of a device while all are busy, and the others are not.
    return replace(part, **{name: getattr(machines, name) * each / devices for name in _SHARED})
