"""Joining of several hosts to one JAX program."""

from jaxrlhf.config.refusal import Refusal


def join_hosts() -> None:
    """Join all hosts on which this command was started, before JAX looks for devices.

    Raises:
      Refusal: JAX finds no other hosts.
    """
    import jax

    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise Refusal(
            f"--multihost calls jax.distributed.initialize(), which failed with {error}; start the command on every "
            "host of a TPU slice, of Slurm or of MPI, or remove --multihost"
        ) from error
