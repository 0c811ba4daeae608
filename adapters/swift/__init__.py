"""
Plans inside ms-swift's own commands.

A plugin of two lines calls `install` from the file that `--external_plugins` names. `command` has
a command and what stands against a plan, `packs` the data set of packs, `training` the trainer that
follows their schedule.
"""

from packplan.adapters.swift.plugin import install
