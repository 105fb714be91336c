"""More algorithms for Relax, written against its public interface alone."""
