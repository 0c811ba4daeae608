"""Builds what a run needs from its configuration: `stores` without torch, `training` with it."""
