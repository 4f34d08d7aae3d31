"""Sources of image labels: lists, devkits, class files and folder names."""
