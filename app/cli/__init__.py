"""
Functions that every command uses: options, exit statuses, and messages after Ctrl-C or on a full
disk.
"""
