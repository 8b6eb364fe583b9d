struct summary {
    double mean;
    double sd;
    double median;
};

struct summary summarise(double *values, size_t count)
