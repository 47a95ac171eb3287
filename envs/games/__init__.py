"""Small games: tasks are generated, and answers known exactly; the registry names them, and no other room enters."""
