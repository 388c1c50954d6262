"""Workers: the models of a run (actor, critic, reference, reward) on the devices of one resource pool."""
