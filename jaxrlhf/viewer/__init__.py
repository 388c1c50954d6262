"""Web viewer of runs: their curves, samples, times and settings, from the files in their workdirs."""

from jaxrlhf.viewer.app import ViewServer, view_app
