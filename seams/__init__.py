"""The leaf package: seams, errors, limits and the bench row. It imports none of the rooms."""
