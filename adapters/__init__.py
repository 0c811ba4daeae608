"""Code that meets libraries, files and processes, a subject a file."""

if __name__ == "adapters":  # imported by its own name, from a checkout
    from packplan.checkout import use_installed_name

    use_installed_name(__name__)
else:
    from packplan.adapters.torchvision_shim import install

    install()  # before anything below imports transformers or swift
