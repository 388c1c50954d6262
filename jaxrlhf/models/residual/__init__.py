"""Parts of the residual stream besides attention and the MLP."""
