"""How keys and values are stored in fewer bytes: vectors, layers, pages; knows no model."""
