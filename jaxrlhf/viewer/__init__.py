"""Browser view of runs: their curves, samples, times and settings, from the files in their workdirs."""

from jaxrlhf.viewer.app import view_app
from jaxrlhf.viewer.server import ViewServer
