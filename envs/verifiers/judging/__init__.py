"""A language model as a judge: what it is asked, how its verdict is read, and how it is reached."""
