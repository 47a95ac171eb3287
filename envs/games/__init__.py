"""Small games whose tasks are generated and whose answers are known exactly."""
