"""The commands of `halfstep`, one file each."""
