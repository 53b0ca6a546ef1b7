"""What servers hold and do, and how a job's progress is kept, with no engine beneath."""
