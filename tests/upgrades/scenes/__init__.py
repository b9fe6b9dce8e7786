"""For each room a scene: its users at work, seen at the moment at which all of them are cut off."""
