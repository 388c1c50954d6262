"""Runs from random or small policies that show what algorithms learn; they write curves and tables of the pages."""
