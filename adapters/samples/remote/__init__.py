"""
Files at places of other machines: https, S3, Google Cloud, hubs and others that fsspec reads.
"""
