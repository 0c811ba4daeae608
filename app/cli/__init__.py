"""What all commands share: options, exit statuses, answers to Ctrl-C and to full disks."""
