"""Multi-token prediction (MTP): a further layer that predicts the token after the next one."""
