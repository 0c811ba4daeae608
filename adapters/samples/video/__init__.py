"""
Videos of samples: what a file says of itself, what it costs in tokens, how its frames are read.
"""
