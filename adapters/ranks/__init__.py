"""Connects ranks so that each notices when another one fails; runs workers on ranks or on Ray."""
