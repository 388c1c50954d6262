"""Process settings: environment before JAX starts, cache folders, freed memory, checksums of files."""
