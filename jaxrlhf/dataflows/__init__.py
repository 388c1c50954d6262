"""RL algorithms, one file each; a step is a function of the roles and a `StepInput`."""
