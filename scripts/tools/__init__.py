"""Maintenance of the repository: releases, pictures of the pages, recorded results, checks."""
