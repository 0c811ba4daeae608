"""Parts of every command: options, exit statuses, Ctrl-C, full disks."""
