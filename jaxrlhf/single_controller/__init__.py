"""Single controller: worker groups, futures and resource pools, on local devices or on Ray hosts."""
