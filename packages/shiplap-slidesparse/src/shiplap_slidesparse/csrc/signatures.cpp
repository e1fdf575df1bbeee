// By these shiplap knows that the library and the declarations belong together.
#include "slidesparse.h"

SL_SIGNATURES
