"""Where does the workers' output go?  Through the drain process into files, and on to the terminal."""
