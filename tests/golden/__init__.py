"""What an earlier commit did and wrote, kept as files: the commands of every way to execute, and stored formats."""
