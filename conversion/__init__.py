"""Foreign checkpoints to this package's and back: `modeling-xl convert`.

`convert.py` is the command, `weight_map.py` what all families share, `from_<family>.py` what is known of one family.
"""
