"""Instructions whose following can be checked: IFEval's, their extensions, and prompts made of them."""
