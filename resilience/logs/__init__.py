"""What did all processes of a run write?  Similar lines of many ranks become one."""
