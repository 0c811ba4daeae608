"""What `packplan sft` does around its trainer: from plans, or from a stream."""
