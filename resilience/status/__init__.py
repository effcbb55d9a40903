"""What does a job do now?  Its state from the run folder, as lines and as a screen."""
