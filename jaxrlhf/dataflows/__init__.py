"""RL algorithms, one file each: their steps as functions of the roles and a `StepInput`."""
