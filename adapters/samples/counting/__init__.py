"""Lengths of many samples at once, from the texts that the template makes of them."""
