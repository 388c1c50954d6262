"""Files with records: their lines, compressed or not."""
