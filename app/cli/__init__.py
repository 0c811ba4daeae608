"""Parts that every command uses: options, exit statuses, Ctrl-C, full disks."""
