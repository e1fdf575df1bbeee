// By these shiplap knows that the library and the declarations belong together.
#include "sparse3d.h"

SL_SIGNATURES
