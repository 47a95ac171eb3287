"""Where the roles of a run are, what starts them there, and what happens when one dies."""
