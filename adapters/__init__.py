"""
Connects the core to files, processes, torch, ms-swift and other libraries.

Each module or folder has a single subject.
"""

if __name__ == "adapters":  # imported by its own name, from a checkout
    from packplan.checkout import alias_installed_modules

    alias_installed_modules(__name__)
else:
    from packplan.adapters.torchvision_shim import install

    install()  # before anything below imports transformers or swift
