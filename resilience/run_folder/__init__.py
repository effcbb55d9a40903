"""What did a run leave behind?  Reads its folder: records, logs, output, clocks; merged, and as SQL."""
