"""The sans-I/O decision core: events in, commands out; standard library only."""
