"""Files with records: their lines, packed or not."""
