"""What earlier versions wrote must be read, and gone on with, by this one."""
