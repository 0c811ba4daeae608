"""
Decisions about packs: pure functions and frozen values, without I/O, clock, randomness or torch.
"""

if __name__ == "core":  # imported by its own name, from a checkout
    from packplan.checkout import alias_installed_modules

    alias_installed_modules(__name__)
